"""What Fabric's entry point loads for every Fabric: as little as can be.

``on_after_setup`` is the first hook that Fabric calls on every rank; ``fabric.setup`` calls it,
``fabric.setup_module`` does not.
"""

from typing import Any


def callbacks_factory() -> list[Any]:
    """Fabric calls this whenever one is made, through the package's entry point."""
    return [AirAttachFabric()]


class AirAttachFabric:
    """Attaches a Fabric whose CheckpointIO is an AirCheckpointIO; does nothing to any other."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Attach on every rank, once the first module was set up."""
        plugin = getattr(fabric.strategy, "_checkpoint_io", None)
        if plugin is None:
            return
        # Not at the top: a Fabric without a plugin would pay for what it does not use.
        from air_lightning.integrations.checkpoint_io import AirCheckpointIO
        from air_lightning.integrations.fabric import attach_after_setup

        if isinstance(plugin, AirCheckpointIO):
            attach_after_setup(plugin, fabric, module)
