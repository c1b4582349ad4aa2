"""The interface that every backend implements, and the code that all of them share."""
