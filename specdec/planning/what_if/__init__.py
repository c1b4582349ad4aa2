"""Plans of other circumstances: several sequences at once, several machines, another device."""
