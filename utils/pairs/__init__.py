"""A target and its drafter: request, loading, compatibility, drafter kinds."""
