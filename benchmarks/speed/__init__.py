"""The time of an update in a Trainer's fit, compared with the same optimizer without a callback."""
