"""Plans of other circumstances: several texts at once, several machines, another device."""
