"""Functions of posteriors that no fit has made: their networks return logits of classes, unless a test says otherwise."""

from functools import partial

from lightning_bayes import predictive, zoo

mc_predict = partial(predictive.mc_predict, link="classification")
calibrate = partial(predictive.calibrate, link="classification")
export = partial(predictive.export, link="classification")
MonteCarloNetwork = partial(predictive.MonteCarloNetwork, link="classification")
save_posterior = partial(zoo.save_posterior, link="classification")
