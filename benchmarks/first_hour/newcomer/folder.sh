set -e
python - <<'END'
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for index, (image, label) in enumerate(zip(digits.images[:300], digits.target[:300])):
    folder = Path("pictures", str(label))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 15.9).astype("uint8")).resize((32, 32)).save(folder / f"{index}.png")
END

# added
lightning-bayes fit --config finetune_imagefolder --data.root=pictures --data.image_size=32 --data.resize=32 --trainer.max_epochs=2 --trainer.accelerator=cpu
lightning-bayes test --config finetune_imagefolder --ckpt_path=last --trainer.accelerator=cpu
lightning-bayes predict --config finetune_imagefolder --ckpt_path=last --data.predict_dir=pictures/7 --output=predictions.csv --trainer.accelerator=cpu

# shown
head -1 predictions.csv
