//! Who may ask: keys and limits of tenants, TLS, origins of pages.

use crate::cli::ServeArgs;
use crate::failure::Failure;
use crate::http::tls::{ClientSource, TlsSource};
use crate::tenants::{KeySource, Limits, LimitsSource, TenantSource};
use axum::http::HeaderValue;
use windlass_engine_contract::flags;

/// Whose keys are taken, and how much each may ask.
pub(super) fn tenants(args: &ServeArgs) -> Result<Option<TenantSource>, Failure> {
    let keys = match (&args.api_key_file, &args.api_key_dir) {
        (Some(_), Some(_)) => {
            let message = format!("give either --api-key-file or {}, not both", flags::API_KEY_DIR);
            return Err(Failure::configuration(message));
        }
        (Some(file), None) => Some(KeySource::File(file.clone())),
        (None, folder) => folder.clone().map(KeySource::Folder),
    };
    let limits = limits(args)?;
    match keys {
        Some(keys) => Ok(Some(TenantSource { keys, limits })),
        None if limits.default != Limits::default() || limits.file.is_some() => {
            Err(Failure::configuration("limits are for tenants: give their keys by --api-key-file or --api-key-dir"))
        }
        None => Ok(None),
    }
}

fn limits(args: &ServeArgs) -> Result<LimitsSource, Failure> {
    let default = Limits {
        max_concurrent_requests: args.tenant_max_concurrent_requests,
        tokens_per_minute: args.tenant_tokens_per_minute,
    };
    if default.stop_everything() {
        return Err(Failure::configuration("a tenant's limit must be at least 1"));
    }
    Ok(LimitsSource { default, file: args.tenant_limits_file.clone() })
}

/// How the API port proves what it is, and asks clients to.
pub(super) fn tls(args: &ServeArgs) -> Result<Option<TlsSource>, Failure> {
    let clients = match (&args.ssl_ca_certs, args.ssl_cert_reqs) {
        (None, 0) => None,
        (Some(authorities), demanded @ 1..=2) => {
            Some(ClientSource { authorities: authorities.clone(), required: demanded == 2 })
        }
        (Some(_), _) => {
            let message = "--ssl-ca-certs is for clients' certificates: ask for them by --ssl-cert-reqs 2 (or 1)";
            return Err(Failure::configuration(message));
        }
        (None, _) => return Err(Failure::configuration("--ssl-cert-reqs needs --ssl-ca-certs to check them with")),
    };
    match (&args.ssl_certfile, &args.ssl_keyfile) {
        (Some(certificate), Some(key)) => {
            Ok(Some(TlsSource { certificate: certificate.clone(), key: key.clone(), clients }))
        }
        (None, None) if clients.is_none() => Ok(None),
        _ => Err(Failure::configuration("TLS needs both --ssl-certfile and --ssl-keyfile")),
    }
}

/// A JSON list, as vLLM takes it, or one origin.
pub(super) fn allowed_origins(args: &ServeArgs) -> Result<Vec<HeaderValue>, Failure> {
    let Some(text) = &args.allowed_origins else { return Ok(Vec::new()) };
    let wrong = |why: String| Failure::configuration(format!("--allowed-origins {text:?}: {why}"));
    let origins: Vec<String> = match text.starts_with('[') {
        true => serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?,
        false => vec![text.clone()],
    };
    let valid = |origin: &&String| *origin == "*" || origin.starts_with("http://") || origin.starts_with("https://");
    if let Some(origin) = origins.iter().find(|origin| !valid(origin)) {
        return Err(wrong(format!("{origin:?} is no origin; write https://host, or * for any")));
    }
    origins.iter().map(|origin| HeaderValue::from_str(origin).map_err(|error| wrong(error.to_string()))).collect()
}
