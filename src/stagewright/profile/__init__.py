"""What every unit of a model costs on a device: measured there, computed for hardware that isn't there, or imported."""
