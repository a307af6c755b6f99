"""The character model on War and Peace, Khan et al. 2018, App. M."""
