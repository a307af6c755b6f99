"""Validation, test and prediction under samples."""
