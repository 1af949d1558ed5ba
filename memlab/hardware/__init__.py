"""Hardware: the catalogue of GPUs (`gpus`) and how long operators take on one (`roofline`); what this machine grants (`host`). Without torch."""
