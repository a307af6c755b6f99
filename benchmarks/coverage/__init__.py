"""Which models of torchvision, timm and transformers are measured right."""
