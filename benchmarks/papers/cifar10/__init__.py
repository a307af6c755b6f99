"""CIFAR-10: networks and settings of Osawa et al. 2019 and Zhang et al. 2018, resumable runs, and the table."""
