"""DFlash heads: their files, the model on torch, and the source of one for planning and loading."""
