//! GPUs are asked for as they are offered: as many as ranks, or a slice of one; and what does not fit says so.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::with_own_nodes;
use windlass_tests::service::{self, Service};

const PATIENCE: Duration = Duration::from_secs(90);
const GPU: &str = "nvidia.com/gpu";
const SLICE: &str = "nvidia.com/mig-1g.10gb";

#[test]
fn ranks_become_gpus_and_a_replica_too_many_says_why_it_waits() -> Result<()> {
    with_own_nodes("placement", |namespace| {
        namespace.cluster().advertise(GPU, 8)?;
        let mut spec = service::simulated(&[]);
        spec["accelerator"] = json!({"type": "NvidiaGPU"});
        spec["parallelism"] = json!({"tensor": 4});
        spec["replicas"] = json!(2);
        let service = Service::apply(namespace, "sharded", &spec)?;
        service.wait_ready(2, PATIENCE)?;
        for pod in service.pods()? {
            ensure!(limit(&pod, GPU)? == "4", "{pod:?}");
            let effective = service.stats(&pod)?.effective;
            ensure!(effective.as_ref().is_some_and(|config| config.tensor_parallel == 4), "{effective:?}");
        }
        service.scale(3)?;
        let condition = service.wait_words("Insufficient nvidia.com/gpu", PATIENCE)?;
        ensure!(condition.type_ != "Ready" || condition.status == "False", "{condition:?}");
        Ok(())
    })
}

#[test]
fn a_slice_of_a_gpu_is_asked_for_by_its_profile() -> Result<()> {
    with_own_nodes("slices", |namespace| {
        namespace.cluster().advertise(SLICE, 1)?;
        let mut spec = service::simulated(&[]);
        spec["accelerator"] = json!({"type": "NvidiaGPU", "nvidiaGPU": {"migProfile": "1g.10gb"}});
        let service = Service::apply(namespace, "sliced", &spec)?;
        service.wait_ready(1, PATIENCE)?;
        for pod in service.pods()? {
            ensure!(limit(&pod, SLICE)? == "1" && limit(&pod, GPU)?.is_empty(), "{pod:?}");
        }
        Ok(())
    })
}

fn limit(pod: &Pod, resource: &str) -> Result<String> {
    let containers = pod.spec.as_ref().map(|spec| &spec.containers).context("a pod without a spec")?;
    let limits = containers.first().and_then(|engine| engine.resources.as_ref()?.limits.as_ref());
    Ok(limits.and_then(|limits| limits.get(resource)).map(|count| count.0.clone()).unwrap_or_default())
}
