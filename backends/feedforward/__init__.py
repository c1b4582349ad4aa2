"""Feed-forward layers whose rows do not depend on each other: activations, routers, experts."""
