import torch
from digits import Classifier, quiet, test, train, val
from lightning.pytorch import Trainer

# added
from lightning_bayes import VOGNCallback

trainer = Trainer(max_epochs=10, callbacks=[VOGNCallback()], **quiet)
model = Classifier()
trainer.fit(model, train, val)
trainer.test(model, test, verbose=False)
prediction = trainer.predict(model, test)

# shown
print(
    sorted(prediction[0]), f"mutual information {torch.cat([p['mutual_information'] for p in prediction]).mean():.4f}"
)
