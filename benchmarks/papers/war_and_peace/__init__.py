"""The character model of War and Peace, Khan et al. 2018, App. M."""
