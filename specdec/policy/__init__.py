"""How large a tree is drafted, and whether to draft at all."""
