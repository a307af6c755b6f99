import torch
from digits import Classifier, quiet, test, train, val
from lightning.pytorch import Trainer

plain = Trainer(max_epochs=10, **quiet)
plain.fit(Classifier(), train, val)
plain.save_checkpoint("plain.ckpt")

# added
from lightning_bayes import LaplaceCallback

trainer, model = Trainer(callbacks=[LaplaceCallback(likelihood="classification")], **quiet), Classifier()
model.train_dataloader, model.val_dataloader = lambda: train, lambda: val
trainer.test(model, test, ckpt_path="plain.ckpt", verbose=False)
prediction = trainer.predict(model, test, ckpt_path="plain.ckpt")

# shown
print(f"mutual information {torch.cat([p['mutual_information'] for p in prediction]).mean():.4f}")
