"""The port to Lightning. The batch is divided by hand, as otherwise more processes make larger steps."""

import os

import lightning
import torch
from problem import BATCH, EPOCHS, data, make_model
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        inputs, targets = batch
        outputs = self.model(inputs)
        self.log("loss", F.cross_entropy(outputs, targets), sync_dist=True, batch_size=len(targets))
        correct = (outputs.argmax(1) == targets).float().mean()
        self.log("accuracy", correct, sync_dist=True, batch_size=len(targets))

    def on_validation_epoch_end(self) -> None:
        measured = self.trainer.callback_metrics
        self.print(
            f"epoch {self.current_epoch}: loss {measured['loss']:.4f}, accuracy {measured['accuracy']:.4f}",
        )

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


workers = int(os.environ.get("WORLD_SIZE", "1"))
lightning.seed_everything(0)
train, test = data()
train_loader = DataLoader(train, BATCH // workers, shuffle=True)
test_loader = DataLoader(test, BATCH // workers)
module = Module()
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    gradient_clip_val=1.0,
    devices=workers,
    accelerator="cpu",
    strategy="ddp" if workers > 1 else "auto",
    logger=False,
    enable_checkpointing=False,
    num_sanity_val_steps=0,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, train_loader, test_loader)
if trainer.is_global_zero:
    torch.save(module.model.state_dict(), "model.pt")
