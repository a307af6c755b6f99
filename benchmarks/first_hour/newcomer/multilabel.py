import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
x = torch.randn(400, 4)
y = (x[:, :3] + x[:, 1:] > 0).float()
loader = DataLoader(TensorDataset(x, y), 50)
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}

# added
from lightning_bayes import VOGNCallback

trainer = Trainer(max_epochs=10, callbacks=[VOGNCallback()], **quiet)
trainer.fit(Tagger(), loader)
prediction = trainer.predict(trainer.lightning_module, loader)[0]

# shown
information = prediction["mutual_information"]
print(f"mutual information {list(information.shape)}, one value a label, mean {information.mean():.4f}")
