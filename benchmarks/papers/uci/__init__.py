"""UCI regression, Table 1 of Zhang et al. 2018 and of Khan et al. 2018, on the standard splits: ``__main__`` runs it.

The networks of all splits of a set train at once: every tensor has the split as a leading dimension ``[R, …]``, and those of
K weight samples ``[K, R, …]``. Gradients, squares and Kronecker factors of the one hidden layer are written out in `network`
as batched matrix products; the updates are the package's own pure functions, which take leading dimensions.
"""
