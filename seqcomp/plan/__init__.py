"""What the user asks for: the plan language, its rules and its resolution. Torch-free."""
