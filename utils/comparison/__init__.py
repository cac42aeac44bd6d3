"""What runs side by side, and what is kept from it."""
