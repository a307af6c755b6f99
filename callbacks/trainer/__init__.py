"""What the callbacks ask of Lightning's trainer, its loaders and the user's steps."""
