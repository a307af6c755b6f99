"""Mean test returns on Half-Cheetah, from the two sets of five runs that Khan et al. 2018 released.

The mean over seeds of the mean over all tests up to a time step, and its standard error, recomputed from the released files.
The order of the methods differs between the two sets.
"""

from __future__ import annotations

from typing import Final

BOTH_SETS: Final = {  # ten runs per method: after 300 000 and after 3 000 000 time steps
    "vadam": ((1340, 187), (3288, 167)),
    "vadagrad": ((1126, 145), (3077, 179)),
    "adam_plain": ((878, 132), (3006, 414)),
    "adam_explore": ((1410, 145), (3287, 325)),
    "sgd_plain": ((415, 184), (1222, 403)),
    "sgd_explore": ((1377, 154), (2356, 314)),
}
