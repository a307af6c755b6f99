from PIL import Image

# added
from lightning_bayes import Predictor

predict = Predictor.load("lenet5-digits")
prediction = predict(Image.radial_gradient("L"))

# shown
print(f"entropy {float(prediction.entropy):.2f}, mutual information {float(prediction.mutual_information):.2f}")
