"""Zhang et al. 2018, Table 3: test RMSE with random (R) and active (A) choices."""

from __future__ import annotations

from typing import Final

PUBLISHED: Final = {  # method: set: (R, A)
    "noisy_adam_fisher": {  # NNG-FFG
        "boston": (5.911, 5.435),
        "concrete": (12.583, 12.563),
        "energy": (4.011, 3.761),
        "kin8nm": (0.246, 0.252),
        "power": (5.812, 5.423),
        "wine": (0.730, 0.748),
        "yacht": (7.381, 6.583),
    },
    "noisy_kfac": {  # NNG-MVG
        "boston": (5.831, 5.220),
        "concrete": (12.301, 11.671),
        "energy": (3.635, 3.211),
        "kin8nm": (0.243, 0.244),
        "power": (5.377, 4.974),
        "wine": (0.752, 0.746),
        "yacht": (7.192, 6.371),
    },
}
ERRORS: Final = {  # standard errors of NNG-MVG, (R, A)
    "boston": (0.177, 0.132),
    "concrete": (0.203, 0.175),
    "energy": (0.084, 0.076),
    "kin8nm": (0.003, 0.004),
    "power": (0.133, 0.078),
    "wine": (0.014, 0.009),
    "yacht": (0.280, 0.204),
}
SETS: Final = tuple(ERRORS)
