"""The library of llama.cpp, and its operators one by one: called, tried out and timed."""
