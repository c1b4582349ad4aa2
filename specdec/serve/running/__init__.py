"""Running servers, as their operator sees them: records of them, and their log files."""
