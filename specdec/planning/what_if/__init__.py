"""What-if plans: several sequences at once, several machines, another device, known models."""
