"""From text to token ids: chat templates, conversations, prompt files."""
