"""llama.cpp's library, and ggml's operators one by one: called, checked and timed."""
