"""The processes that stay: Prefect's server, a worker, MLflow's page. `slime up` starts them."""
