"""Several models behind one address: which are loaded, for how long, and in which memory."""
