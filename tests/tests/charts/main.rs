//! What the chart ships for other programs, judged without a cluster: rules, dashboard, Argo CD's scripts.

mod alerts;
mod argocd;
mod dashboard;
