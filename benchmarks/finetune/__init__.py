"""Fine-tuning with uncertainty: a network trained on digits, adapted to clothing and to letters with 1000 images."""
