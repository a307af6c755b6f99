import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 2))

    def forward(self, x):
        mean, raw = self.net(x).unbind(1)
        return mean, F.softplus(raw) + 1e-4

    def training_step(self, batch, index):
        mean, variance = self(batch[0])
        return nn.GaussianNLLLoss()(mean, batch[1], variance)

    def test_step(self, batch, index):
        self.log("test_loss", self.training_step(batch, index))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


torch.manual_seed(0)
x = torch.rand(400, 1) * 6 - 3
y = x[:, 0].sin() + 0.1 * (1 + x[:, 0].abs()) * torch.randn(400)
loader = DataLoader(TensorDataset(x, y), 50)
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}

# added
from lightning_bayes import VOGNCallback

trainer = Trainer(max_epochs=60, callbacks=[VOGNCallback()], **quiet)
model = Regressor()
trainer.fit(model, loader)
(scores,) = trainer.test(model, loader, verbose=False)
prediction = trainer.predict(model, loader)[0]

# shown
print(sorted(prediction), {key: round(value, 3) for key, value in scores.items() if "coverage" in key or "RMSE" in key})
