package main

import (
	"os"

	"helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
)

// helm is the client as its users have it; its writes carry the manager name `helm`.
func helm() {
	kube.ManagedFieldsManager = "helm"
	root, err := cmd.NewRootCmd(os.Stdout, os.Args[1:], cmd.SetupLogging)
	exitOn(err)
	if root.Execute() != nil {
		os.Exit(1)
	}
}
