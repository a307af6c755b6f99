"""One hidden layer on the splits of a UCI set, for the regressions of both papers.

The networks of all splits of a set train at once: every tensor has the split as a leading dimension ``[R, …]``; with K
weight samples it is ``[K, R, …]``. `network` writes out the gradients, squares and Kronecker factors of the one hidden
layer as batched matrix products. The updates are the package's pure functions, which accept leading dimensions.
"""
