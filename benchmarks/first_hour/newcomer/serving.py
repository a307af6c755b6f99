import torch
from digits import Classifier, quiet, test, train
from lightning.pytorch import Trainer

from lightning_bayes import VOGNCallback

trainer = Trainer(max_epochs=10, callbacks=[VOGNCallback()], **quiet)
trainer.fit(Classifier(), train)
trainer.save_checkpoint("vogn.ckpt")

# added
from lightning_bayes import Predictor, load_posterior, zoo

zoo.save_posterior("net.safetensors", Classifier(), load_posterior("vogn.ckpt"))
predict = Predictor.load("net.safetensors", model=Classifier(), reject_below=0.8)
answer = predict(test.dataset.tensors[0])

# shown
information = torch.as_tensor(answer.mutual_information).mean()
print(f"rejected {int(answer.reject.sum())} of {len(answer.reject)}; mutual information {information:.4f}")
