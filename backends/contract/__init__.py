"""What every backend promises, and what all of them share."""
