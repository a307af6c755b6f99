# %% [markdown]
# # 3. Fine-tuning on a folder of images
#
# A network pretrained on digits is fine-tuned on three shapes with seventy training images each. The resulting posterior is saved
# in a single file that serves predictions. The images are generated here; replace them with your own folder.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from PIL import Image, ImageDraw

from lightning_bayes import Predictor, VOGNCallback, zoo
from lightning_bayes.zoo import (
    BayesClassifier,
    DigitsDataModule,
    ImageFolderDataModule,
    create_model,
)

generator = torch.Generator().manual_seed(0)


def uniform(low, high):
    return low + (high - low) * torch.rand((), generator=generator).item()


def picture(kind):
    """A white shape of random size and position on a black background, 56 x 56 pixels, with noise."""
    image = Image.new("L", (56, 56))
    x, y, r = uniform(20, 36), uniform(20, 36), uniform(9, 17)
    corners = {"square": 4, "triangle": 3, "disc": 60}[kind]
    ImageDraw.Draw(image).regular_polygon(
        (x, y, r), corners, rotation=uniform(0, 90), fill=220
    )
    noise = 18 * torch.randn(56, 56, generator=generator)
    return Image.fromarray(
        (
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(
                56, 56
            )
            + noise
        )
        .clamp(0, 255)
        .byte()
        .numpy()
    )


for kind in ("disc", "square", "triangle"):
    Path("pictures", kind).mkdir(parents=True)
    for number in range(100):
        picture(kind).save(f"pictures/{kind}/{number}.png")

# %% [markdown]
# First, pretrain a network on a different task: LeNet-5 on digits, enlarged to 28 × 28 pixels.

# %%
seed_everything(0, verbose=False)
digits = DigitsDataModule()
digits.setup("fit")
images, classes = digits.train_set.tensors
images = F.interpolate(images, 28, mode="bilinear")
lenet = create_model("lenet5", num_classes=10, in_channels=1, image_size=28)
adam = torch.optim.Adam(lenet.parameters(), lr=2e-3)
for _ in range(4):
    for batch in torch.randperm(len(images)).split(32):
        adam.zero_grad()
        F.cross_entropy(lenet(images[batch]), classes[batch]).backward()
        adam.step()
print(
    f"digits: {(lenet(images).argmax(1) == classes).float().mean():.3f} correct on the training images"
)

# %% [markdown]
# Now fine-tune on the folder. `prior_mean="initial"` centres the prior at the pretrained weights. The new head starts from random
# weights.

# %%
data = ImageFolderDataModule(
    "pictures",
    image_size=28,
    resize=28,
    mean=(0.3,),
    std=(0.3,),
    batch_size=10,
    num_workers=0,
)
model = create_model(
    "lenet5", num_classes=3, in_channels=1, image_size=28, pretrained=lenet.state_dict()
)
task = BayesClassifier(
    model, num_classes=3, optimizer=lambda p: torch.optim.Adam(p, lr=2e-3)
)
callback = VOGNCallback(prior_mean="initial")
trainer = Trainer(
    max_epochs=30,
    callbacks=[callback],
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(task, data)
metrics = trainer.test(task, data, verbose=False)[0]
print(
    {
        key: round(value, 3)
        for key, value in metrics.items()
        if key in ("test/cls/Acc", "test/cls/NLL", "test/cal/ECE")
    }
)

# %% [markdown]
# The posterior, the architecture, the input transform and the class names are saved in one file. `Predictor` loads it in another
# process, without this script.

# %%
zoo.save_posterior(
    "shapes.safetensors",
    task.model,
    callback.optimizer.posterior().select("model."),
    class_names=data.class_names,
)
predict = Predictor.load("shapes.safetensors", reject_below=0.7)
known = [picture(kind) for kind in ("disc", "square", "triangle")]
unknown = [
    Image.fromarray(
        ((image[0] - image.min()) / (image.max() - image.min()) * 220).byte().numpy()
    )
    for image in images[:3]
]
answers = predict(known + unknown)

figure, axes = plt.subplots(1, 6, figsize=(11, 2.4), layout="constrained")
for index, (ax, image) in enumerate(zip(axes, known + unknown, strict=True)):
    ax.imshow(image, cmap="gray")
    verdict = "rejected" if answers.reject[index] else answers.labels[index]
    ax.set_title(f"{verdict}\nentropy {answers.entropy[index]:.2f}", fontsize=9)
    ax.axis("off")
figure.savefig("answers.png", dpi=110)

# %% [markdown]
# The last three images are digits, which are not in the folder. The threshold rejects some of them and accepts others: a network
# that distinguishes shapes has not learned to recognise inputs that are not shapes. Choose thresholds on validation data, and
# measure OOD detection on inputs of the kind that you expect (`--data.ood`, see
# [evaluation](../evaluation.md#ood-data-and-shift)).
#
# [Fine-tuning](../finetuning.md) shows the same from the command line, with ResNet-18 and ImageNet weights.
