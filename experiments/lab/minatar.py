"""MinAtar's games, by their own names for Gymnasium: --env-id lab.minatar:breakout."""

import gymnasium as gym

from lab.catalogue import MINATAR

for game in MINATAR:
    gym.register(game, "minatar.gym:BaseEnv", kwargs={"game": game})
