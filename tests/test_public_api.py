"""The public names: what is there, and what importing the package does not do."""

import subprocess
import sys

import pytest

import air_lightning

# From the contract; a name that is missing here is a name that users cannot rely on.
CONTRACT = {
    "UCVolumeDataset",
    "DataLoader",
    "Checkpointable",
    "UCVolumeWriter",
    "UCVolumeReader",
    "find_latest_valid",
    "list_checkpoints",
    "verify_checkpoint",
    "prune_checkpoints",
    "export_checkpoint",
    "capture_rng_state",
    "restore_rng_state",
    "AirCheckpointIO",
    "AirResume",
    "AirDataModule",
    "AirError",
    "write_manifest",
}


def test_every_public_name_resolves() -> None:
    """Each name in __all__ can be imported from the package."""
    for name in air_lightning.__all__:
        assert getattr(air_lightning, name) is not None


def test_the_two_lists_agree() -> None:
    """What is exported and where it is imported from are the same names."""
    assert set(air_lightning.__all__) == {"__version__", *air_lightning._HOME_OF}


def test_the_contract_is_public() -> None:
    """Every name of the contract that this release has is exported."""
    assert set(air_lightning.__all__) >= CONTRACT


def test_every_error_is_public_and_an_air_error() -> None:
    """A caller can name each error from the package, and catch all by AirError."""
    from air_lightning import errors

    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, air_lightning.AirError)
            assert name in air_lightning.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as on any module."""
    with pytest.raises(AttributeError, match="UCVolumeDatasets"):
        air_lightning.UCVolumeDatasets  # noqa: B018 - the access is the test


def test_import_is_light() -> None:
    """Importing the package and its catalogue loads neither torch nor lightning nor mlflow."""
    code = (
        "import sys, air_lightning; air_lightning.find_latest_valid; air_lightning.AirError;"
        "print([m for m in ('torch', 'lightning', 'mlflow', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_imports_nothing_that_its_loader_could_have_imported(tmp_path) -> None:
    """What every one of many workers would import by itself, the training process has imported."""
    (tmp_path / "file").write_bytes(b"1")
    code = (
        "import sys, air_lightning\n"
        "def imported(path):\n"
        "    return ','.join(sys.modules)\n"
        f"files = air_lightning.UCVolumeDataset('file://{tmp_path}')\n"
        "loader = air_lightning.DataLoader(files.map(imported), num_workers=1)\n"
        "[there] = next(iter(loader))\n"
        "print(sorted(set(there.split(',')) - set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
