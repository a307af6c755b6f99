"""Coverage of the models of torchvision, timm and transformers."""
