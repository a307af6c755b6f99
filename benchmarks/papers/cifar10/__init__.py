"""CIFAR-10 with many methods, compared with Table 1 of Osawa et al. 2019 and Table 2 of Zhang et al. 2018."""
