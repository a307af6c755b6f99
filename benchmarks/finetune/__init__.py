"""Fine-tuning with uncertainty: a network trained on digits, adapted to clothes and to letters with 1000 images."""
