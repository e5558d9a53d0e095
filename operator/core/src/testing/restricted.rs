//! A checker for Pod Security *restricted*, as its specification lists the controls, and for what we ask beyond it.

use k8s_openapi::api::core::v1::{Container, PodSpec, Volume};

/// What the pod violates; empty where it passes.
pub fn violations(pod: &PodSpec) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |holds: bool, what: &str| {
        if !holds {
            found.push(what.to_owned());
        }
    };
    let none = |flag: Option<bool>| !flag.unwrap_or(false);
    check(none(pod.host_network) && none(pod.host_pid) && none(pod.host_ipc), "host namespaces");
    check(pod.automount_service_account_token == Some(false), "service account token");
    let security = pod.security_context.clone().unwrap_or_default();
    check(security.run_as_non_root == Some(true), "runAsNonRoot");
    check(security.run_as_user.is_some_and(|user| user > 0), "runAsUser");
    check(security.seccomp_profile.as_ref().is_some_and(|profile| profile.type_ == "RuntimeDefault"), "seccomp");
    check(security.sysctls.is_none(), "sysctls");
    for volume in pod.volumes.iter().flatten() {
        check(is_allowed(volume), &format!("volume {}", volume.name));
    }
    for container in pod.containers.iter().chain(pod.init_containers.iter().flatten()) {
        found.extend(container_violations(container));
    }
    found
}

fn container_violations(container: &Container) -> Vec<String> {
    let security = container.security_context.clone().unwrap_or_default();
    let capabilities = security.capabilities.clone().unwrap_or_default();
    let ports = container.ports.iter().flatten();
    [
        (security.allow_privilege_escalation == Some(false), "allowPrivilegeEscalation"),
        (security.privileged != Some(true), "privileged"),
        (security.read_only_root_filesystem == Some(true), "readOnlyRootFilesystem"),
        (security.run_as_user.is_none_or(|user| user > 0), "runAsUser"),
        (security.run_as_non_root != Some(false), "runAsNonRoot"),
        (security.proc_mount.is_none(), "procMount"),
        (capabilities.drop == Some(vec!["ALL".to_owned()]), "capabilities.drop"),
        (capabilities.add.is_none(), "capabilities.add"),
        (ports.into_iter().all(|port| port.host_port.is_none()), "hostPort"),
    ]
    .into_iter()
    .filter(|(holds, _)| !holds)
    .map(|(_, what)| format!("container {}: {what}", container.name))
    .collect()
}

/// Volume types that *restricted* allows, of which ours are a part.
fn is_allowed(volume: &Volume) -> bool {
    volume.empty_dir.is_some()
        || volume.secret.is_some()
        || volume.config_map.is_some()
        || volume.persistent_volume_claim.is_some()
}
