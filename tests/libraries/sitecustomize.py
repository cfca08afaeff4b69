"""Lets scripts that tests start import transformers where torchvision was built for another torch: see PYTHONPATH."""

from stagewright.model.networks.libraries import import_library, is_installed

if is_installed("torchvision"):
    import_library("torchvision")
