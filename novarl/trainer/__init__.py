"""The Python API, and the commands `python -m novarl.trainer.{ppo,sft,dpo,rm}`."""
