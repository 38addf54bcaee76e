"""Images in prompts: files are decoded and cut into the tiles that a model's image encoder takes, without PyTorch."""
