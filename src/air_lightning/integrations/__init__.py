"""Lightning and Fabric: the only folder that imports lightning."""
