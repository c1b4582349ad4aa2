"""The roofline of a model, from its header alone: `specdec analyze`."""
